"""Questions that the model answers: every pair of a form and a subject, in an order that a seed decides."""
from __future__ import annotations

import random

FORMS = """What is {}?
Explain {} to a child.
Explain {} in detail, step by step.
Write a short story about {}.
Write a poem about {}.
Give five facts about {}.
What are the advantages and disadvantages of {}?
How does {} work?
Write an email to a friend about {}.
Summarize what is known about {} in three sentences.
Make a list of ten questions about {}.
Write a dialogue between two people who talk about {}.
Why does {} matter?
Write a product description that has to do with {}.
Compare {} with something else that is like it.
What would the world be without {}?
Write a lesson plan about {}.
Write the introduction of an essay about {}.
Give me advice on {}.
What are common mistakes about {}?
Write a Python program that has to do with {}.
Write a JSON object that describes {}.
Tell me the history of {}.
How could I learn more about {}?
Describe {}.
Tell me a joke about {}.
Tell me about {}.
Write a paragraph about {}.
Invent a game that has to do with {}.
Who was important for {}, and when?
Write a short speech about {}.
Rewrite this sentence politely: I do not want to hear about {}.
Translate into French: I like {}.
What should a beginner know about {}?
What are three surprising things about {}?
I have a question about {}. Where should I begin?
How is {} connected with everyday life?
Make a plan for a week that has to do with {}.
Write a headline and a news article about {}.
Is {} good or bad? Give reasons.""".splitlines()

SUBJECTS = """\
photosynthesis, the French Revolution, black holes, cooking rice, learning to swim, the stock market, bicycles,
bees, the moon, renewable energy, the Roman Empire, sleep, playing the guitar, vaccines, the internet, mountains, a
good night's rest, gardening, trains, chess, coffee, the human heart, volcanoes, gravity, writing a letter, money,
dogs, cats, rivers, bread, the alphabet, electricity, dreams, football, paper, glass, time, weather, the ocean,
bridges, friendship, teamwork, a job interview, sorting a list, prime numbers, fractions, a healthy breakfast,
public transport, museums, libraries, the desert, whales, birds, forests, robots, computers, phones, maps,
calendars, birthdays, travelling by train, moving house, saving water, recycling, the speed of light, atoms, DNA,
the immune system, antibiotics, printing, newspapers, democracy, elections, courts, taxes, shopping online, running,
yoga, tea, chocolate, cheese, apples, sailing, aeroplanes, rockets, satellites, earthquakes, storms, snow, rainbows,
colours, music, painting, theatre, films, novels, fairy tales, heroes, pirates, castles, knights, dragons, ghosts,
gold, iron, plastics, cotton, shoes, houses, cities, villages, farms, cows, horses, ants, spiders, sharks, the
brain, memory, language, numbers, logic, ethics, happiness"""


def questions(seed: int) -> list[str]:
    """All of them."""
    subjects = [subject.strip() for subject in SUBJECTS.replace("\n", " ").split(",")]
    found = [form.format(subject) for form in FORMS for subject in subjects]
    random.Random(seed).shuffle(found)
    return found
