"""The two halves of the prompts; no prompt stands in both."""

from __future__ import annotations

SYSTEM = "You are a helpful assistant."
OTHER_SYSTEM = "You answer as a pirate would, in one long sentence."

CALIBRATION = (
    "Why is the sky blue?",
    "Write a short letter to a landlord about a broken heater.",
    "Explain how a bicycle stays upright.",
    "List some uses for old newspapers.",
    "What should I pack for a week in the mountains?",
    "Tell me a story about a lighthouse keeper.",
    "Write a Python function that reverses a string.",
    "How do vaccines work?",
    "Compare tea and coffee.",
    "Describe a market on a rainy morning.",
    "What is 17 times 23? Show the steps.",
    "Give advice to somebody who cannot sleep.",
)

JUDGED = (
    "What makes bread rise?",
    "Write a poem about a train at night.",
    "How can a small shop find more customers?",
    "Explain what a prime number is to a child.",
    "Describe the life of a beaver.",
    "Write a dialogue between a doctor and a patient with a cough.",
    "What were the causes of the First World War?",
    "How do I change a flat tyre?",
    "Invent a new sport and give its rules.",
    "Write an SQL query that counts orders per customer.",
    "Why do leaves change colour in autumn?",
    "Summarise the plot of a film about a lost dog.",
)
