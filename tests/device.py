"""Where the tests' models compute: on the CPU, or what `ADAPTIVE_VERIFICATION_TEST_DEVICE` says, e.g. `cuda`."""

from __future__ import annotations

import os

import torch

DEVICE = torch.device(os.environ.get("ADAPTIVE_VERIFICATION_TEST_DEVICE", "cpu"))
