"""Openings of users' turns of many kinds, which the target itself completes: what it asks is then its own distribution.

An opening is a text, and whether it is a whole question. Passages are pieces of Python's documentation (PSF licence),
and later what the target answered before.
"""

from __future__ import annotations

import re
from pydoc_data.topics import topics
from random import Random

DOCUMENTS = [
    part.strip() for text in topics.values() for part in re.split(r"\n\n+", text) if 150 < len(part.strip()) < 900
]

SUBJECTS = (
    "the ocean,a lost dog,climate change,a robot,photosynthesis,the French Revolution,a bakery,black holes,vaccines,"
    "machine learning,a wedding,inflation,chess,jazz music,renewable energy,DNA,a job interview,Shakespeare,sleep,"
    "time travel,volcanoes,democracy,coffee,friendship,football,nutrition,bridges,a detective,the Silk Road,privacy,"
    "memory,penguins,an earthquake,a museum,social media,bees,supply and demand,the moon landing,plastic,gravity"
)
NAMES = "Tom,Maria,Janet,Alex,Priya,Ahmed,Sofia,John,Lena,Carlos,Mei,Olga,Sam,Nina,David"
THINGS = "apples,books,marbles,cookies,pencils,eggs,tickets,miles,dollars,stickers,flowers,hours,boxes,coins"
WORDS = "Die,Der,Das,Ein,Eine,Ich,Wir,Sie,Es,In,Im,Am,Nach,Wenn,Heute,Auf,Mit,Für,Aber,Diese,Als,Zwei,Seit,Man"
PLACES = "LONDON -,(CNN) -,WASHINGTON,Police in,A woman,The government,Scientists,Researchers,A man,At least"
LISTS = {"subject": SUBJECTS, "name": NAMES, "things": THINGS, "word": WORDS, "place": PLACES}

OPENINGS = {
    "free": "||What|How|Can you|I |Write|Give me|Explain|Why|Please|Is|Tell me|Create",
    "writing": "Write a short story about {subject}|Write an email to|Compose a blog post about {subject}"
    "|Draft a letter|Write a poem about {subject}|Describe a scene in which|Write a product description for"
    "|Help me write a speech",
    "roleplay": "Pretend to be|You are a doctor.|Act as a travel guide.|Imagine that you are|Take the role of|Please be"
    "|Now you are a math teacher.|Speak like a pirate and tell me about {subject}|Assume the role of an interviewer.",
    "reasoning": "{name} is taller than|If all|Imagine you are in a race with|Which word does not belong|Suppose that"
    "|{name}'s parents have|A man is walking|There are three boxes.|Consider the sequence|One morning after sunrise,",
    "math": "{name} has {number} {things}.|{name} buys {number} {things} for|Solve the equation|The sum of|Calculate"
    "|A store sells {things} at ${number} each.|There are {number} {things}|A train travels {number}|If x"
    "|{name} earns ${number} an hour.|Every day {name}|What is the probability|Find the area of",
    "coding": "Write a Python function|Write a program in C++ that|Implement a function|How do I sort|Create a class"
    "|Fix the bug in this code:\n```python\n|What does this code do?\n```python\n|Given an array of integers,"
    "|Write a SQL query|Write a simple website in HTML|Write a regular expression",
    "extraction": "Extract the main topics from the text below. Answer as a list.\n\n{passage}!|List the key facts of"
    " this text:\n\n{passage}!|Identify the named entities in this text:\n{passage}!|Extract all|Count how many times"
    "|Evaluate the following reviews on a scale of 1 to 5:|Given these records, extract the names and years as JSON:",
    "stem": "Explain how|What is the process of|In the field of quantum physics,|How does|Why do|What is the role of"
    "|What are the main differences between|Describe and explain the|Explain {subject} to",
    "humanities": "Discuss the causes of|What were the main|Describe the significance of|How did the|Analyze the"
    "|Explain the concept of|Compare|What is the relationship between|Write an outline of the history of",
    "translation": "Translate German to English: {word}",
    "summarization": "Summarize: {passage}!|Summarize: {place} |{passage}\n\nWhat are the main points of this text?!"
    "|Summarize the following text in one sentence:\n\n{passage}!",
    "questions": "who|when did|where is|what is the|how many|who wrote|who played|when was the|which|who won the",
    "passages": "{passage}\n\n{passage}\n\nQuestion: what|You are given the following passages:\n\n{passage}\n\n"
    "Answer this question using the passages above: how|{passage}\n\nAccording to the text,",
}
"""The openings by kind, between bars; a whole question ends with an exclamation mark."""

FURTHER = (
    "Rewrite your previous response|Now|Can you explain|What about|Summarize your answer|Translate your answer to"
    "|Make it shorter|Give me an example|Why|How|Could you|What if|Please list||In the same way,"
)


def opening(rng: Random, answers: list[str], further: bool) -> tuple[str, bool]:
    """Return the opening of a turn, and whether it is a whole question; `further`: half go on with the talk."""
    if further and rng.random() < 0.5:
        return rng.choice(FURTHER.split("|")), False
    text = rng.choice(OPENINGS[rng.choice(list(OPENINGS))].split("|"))
    while "{passage}" in text:
        passage = rng.choice(answers if answers and rng.random() < 0.75 else DOCUMENTS)
        text = text.replace("{passage}", passage.replace("{", "(").replace("}", ")"), 1)
    for name, words in LISTS.items():
        text = text.replace(f"{{{name}}}", rng.choice(words.split(",")))
    text = text.replace("{number}", str(rng.randint(2, 90)))
    return text.removesuffix("!"), text.endswith("!")
