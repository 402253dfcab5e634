"""Predicts the acceptance of drafts and decides, across the whole batch, which are worth verifying."""
