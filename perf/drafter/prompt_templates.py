"""Templates of training prompts, and what is put into them."""

from __future__ import annotations

NAMES = (
    "Maya",
    "Omar",
    "Lena",
    "Tom",
    "Priya",
    "Jack",
    "Sofia",
    "Ben",
    "Aisha",
    "Carlos",
    "Nina",
    "Paul",
    "Grace",
    "Ivan",
    "Ruth",
    "Samuel",
)
THINGS = (
    "apples",
    "pencils",
    "books",
    "marbles",
    "tickets",
    "cookies",
    "stickers",
    "eggs",
    "bottles",
    "shirts",
    "flowers",
    "coins",
)
PROBLEMS = (
    "{a} has {i} {x}. {b} gives {a} {j} more, and then {a} shares them equally among {k} friends. How many {x} does "
    "each friend get, and how many are left over?",
    "A shop sells {x} for ${k} each. On Monday it sells {i} and on Tuesday {j}. How much money does it take in all?",
    "{a} walks {k} km to school and back every day. How many kilometres does {a} walk in {j} school days?",
    "A train leaves at {k}:15 and travels {i} miles at {j} miles per hour. When does it arrive?",
    "{a} saves ${j} a week. After {k} weeks {a} spends half of it on {x} that cost $2 each. How many {x} did {a} buy?",
    "There are {i} {x} in a box. {k} percent of them are broken. How many are not broken?",
    "{a} is {k} years older than {b}. Together they are {i} years old. How old is {b}?",
    "A rectangle is {j} cm long and {k} cm wide. What are its area and its perimeter?",
    "{a} reads {k} pages on the first day and twice as many each following day. How many pages after 4 days?",
    "A recipe for {k} people needs {j} {x}. How many {x} are needed for {i} people?",
    "{a} earned ${i} in May, which was ${j} less than in June. {a} paid {k} percent tax on the sum. What was left?",
    "If {k} workers build a wall in {j} days, how long would {i} workers need at the same pace?",
)
# fmt: off
TOPICS = (
    "the water cycle", "renewable energy", "the French Revolution", "black holes", "photosynthesis",
    "machine learning", "healthy eating", "public transport", "the Roman Empire", "time management",
    "climate change", "the human heart", "jazz music", "chess openings", "gardening in small spaces",
    "learning a language", "the stock market", "volcanoes", "remote work", "space travel", "coral reefs",
    "Shakespeare's plays", "electric cars", "sleep", "the immune system", "bees", "coffee", "databases",
    "the printing press", "street food", "mountain climbing", "online privacy", "the Silk Road", "earthquakes",
    "writing a novel", "city parks", "recycling", "robots", "pyramids", "friendship", "open source software",
    "the Great Wall", "vaccines", "dinosaurs", "budgeting", "photography", "the moon landing", "whales",
    "graphic design", "ancient Greece", "quantum computers", "running a marathon", "school uniforms", "museums",
    "artificial light", "negotiation", "the Amazon rainforest", "tea", "bridges", "public speaking", "gravity",
    "trade unions", "weather forecasts", "yoga",
)
# fmt: on
INSTRUCTIONS = (
    "Explain {t} to a ten-year-old.",
    "Write a short blog post about {t}.",
    "List five interesting facts about {t}.",
    "What are the advantages and disadvantages of {t}?",
    "Write a short story that has something to do with {t}.",
    "Give me a step-by-step guide on getting started with {t}.",
    "Write an email to a colleague about {t}.",
    "What should everybody know about {t}?",
    "Compare {t} with {u}.",
    "Write a dialogue between two people who disagree about {t}.",
    "Write a poem about {t}.",
    "Suggest a title and an outline for an essay on {t}.",
    "Why is {t} important? Answer in one paragraph.",
    "Write a product description related to {t}.",
    "Create a table of key terms about {t} with a short definition of each.",
    "What questions could be asked in an interview about {t}? Answer the first one.",
)
PASSAGE_TASKS = (
    "Summarize the following text in two sentences.\n\n{p}",
    "{p}\n\nWhat is the main point of this text?",
    "Rewrite this text so that it is easier to understand:\n\n{p}",
    "Context: {p}\n\nQuestion: What does the text say about {w}?\nAnswer:",
    "Translate the following text to German.\n\n{p}",
    "Translate to French: {p}",
    "Extract the key facts from the text below as a bulleted list.\n\n{p}",
)
