"""Prompts for training a draft head, one a line: questions as people ask them in a chat, in an order that mixes kinds.

    python -m bench.real.head_prompts > prompts.txt     # for tilebeam draft train --text prompts.txt

None of them is among those that bench/lib/guessing_tasks.py asks. GSM8K's training problems are added by --task.
"""

from __future__ import annotations

import random
from itertools import product

_IDEAS = """photosynthesis; compound interest; how vaccines work; the water cycle; inflation; how a fridge cools; black holes;
natural selection; how encryption keeps messages secret; supply and demand; plate tectonics; the greenhouse effect;
how a search engine ranks pages; Newton's laws of motion; how batteries store energy; the immune system; the French
Revolution; how rainbows form; machine learning; how airplanes stay in the air; antibiotic resistance; the stock market;
how the heart pumps blood; hash tables; tides and the moon; how democracy works; the Roman Empire's fall; DNA; caching in
computers; why leaves change colour; how GPS finds a position; probability; jet lag; how bees make honey; soil erosion;
how computers store numbers; the placebo effect; glaciers; electric motors; how languages change over time; time zones;
version control with Git; the carbon cycle; how insurance works; opportunity cost; the nervous system; volcanoes; how
microwave ovens heat food; recycling; public key cryptography; the Silk Road; how noise-cancelling headphones work"""
_ABOUT_IDEAS = """Explain {} in simple terms.; What is the main idea behind {}?; Explain {} to a ten-year-old.; Why does it
matter to understand {}?; Give me five key facts about {}.; Write a short introduction to {} for a school textbook.; What
are common misconceptions about {}?; Write three quiz questions with answers about {}."""
_TASKS = """bake a simple loaf; prepare for a job interview; grow tomatoes on a balcony; save money on groceries; learn a new
language; clean a dirty oven; write a good CV; start a small online shop; train a puppy to sit; fix a dripping tap; pack
for a week in the mountains; give a speech without fear; fall asleep faster; organize a birthday party for children; learn
to play the guitar; keep houseplants alive; study for an exam in two weeks; remove rust from tools; brew good coffee;
take better photos with a phone; paint a room; plan a monthly budget; meditate for the first time; move to another city;
make a podcast; swim freestyle; sew on a button; read more books; sharpen a kitchen knife; set up a home network; build a
bookshelf; knit a scarf; negotiate a higher salary; reduce plastic waste; stop procrastinating; cook rice; set a table"""
_ABOUT_TASKS = """How do I {}?; Give me step by step instructions to {}.; What are the most common mistakes when people {}?;
I want to {}, but I have little time. What should I do first?; List what I need to {}.; Write a checklist for somebody who
wants to {}."""
_MAILS = """invites colleagues to a retirement lunch; asks a teacher for an extension of a deadline; declines a job offer
politely; complains about a parcel that arrived broken; thanks a neighbour for feeding the cat; asks a customer for
feedback; announces a change of office hours; requests a refund for a cancelled concert; apologizes for missing a meeting;
introduces a new member of the team; reminds members of a club to pay their fee; asks for a quote for new windows;
congratulates a friend on a new baby; proposes a partnership to another company; reports a fault in a rented car"""
_ABOUT_MAILS = """Write an email that {}.; Write a short and friendly message that {}.; Draft a formal letter that {}."""
_HEROES = """a robot that is afraid of water; two sisters who open a bakery; a dragon that collects teapots; a clockmaker in
a small town; an astronaut who misses the rain; a cat that runs a bookshop; a boy who can talk to trees; a detective
who cannot lie; the last train of the night; a painter who loses a colour; an old ship on a quiet river; a girl who
builds a flying bicycle; a king who wants to be a gardener; a forest where nobody can sleep; a letter that arrives fifty
years late; a chef who loses the sense of taste; a fox that wants to learn to read; a village below the sea"""
_ABOUT_HEROES = """Write a short story about {}.; Write a poem about {}.; Write the first paragraph of a novel about {}.;
Invent a title and a summary for a film about {}.; Write a dialogue between a child and {}."""
_PAIRS = """electric cars and petrol cars; cats and dogs as pets; living in a city and in the countryside; tea and coffee;
Python and JavaScript; renting and owning a home; books and films; working from home and in an office; SQL and NoSQL
databases; running and cycling; solar and wind power; a laptop and a tablet for a student; capitalism and socialism;
threads and processes; weather and climate; savings accounts and shares; an opera and a musical; mitosis and meiosis"""
_ABOUT_PAIRS = """Compare {}.; What are the differences between {}?; Make a table with advantages and disadvantages of
{}.; Which would you recommend and why: {}?"""
_PLACES = """Rome; Kyoto; the Scottish Highlands; New York; Iceland; Marrakesh; Prague; the Greek islands; Vienna; Costa Rica;
Istanbul; Norway's fjords; Paris; a small village in Tuscany; Berlin; Vancouver; Cape Town; Barcelona"""
_ABOUT_PLACES = """Plan a weekend in {} for a family with two children.; What should I see in {}?; Describe {} for a travel
magazine.; Suggest local dishes to try in {}.; When is the best time of the year to visit {}, and why?"""
_QUESTIONS = """students wear phones at school; a city ban cars from its centre; people work four days a week; children
learn programming at primary school; museums be free; voting be compulsory; a start-up take money from investors; I buy a
used car; homework be abolished; companies track how productive their staff are; zoos exist; I learn Rust or Go first"""
_ABOUT_QUESTIONS = """Should {}?; Give arguments for both sides: should {}?; Write a paragraph with your opinion: should
{}?"""
_CODE = """reverses the words of a sentence; counts the vowels in a string; merges two sorted lists; returns all primes below n;
computes the median of a list; flattens a nested list; checks whether brackets are balanced; converts a Roman numeral to
an integer; rotates a matrix by 90 degrees; finds the longest common prefix of strings; searches a sorted list by
bisection; counts how often each word occurs in a text; removes duplicates but keeps the order; computes the n-th
Fibonacci number; checks whether a number is a palindrome; finds the second largest element; transposes a matrix; parses a
date such as 2024-05-17; computes the greatest common divisor; finds the missing number in a list from 1 to n; returns the
factorial of n; splits a list into chunks of n elements; validates an email address; converts Celsius to Fahrenheit;
finds the longest word of a sentence; sums the digits of a number; sorts dictionaries by a key; generates a random
password; computes the intersection of two lists; encodes a string by run lengths; moves all zeros of a list to its end;
reads a CSV file and sums a column; finds pairs of numbers with a given sum; converts a number to binary; capitalizes
every word; returns the running maximum of a list; computes the distance between two points; checks whether a year is a
leap year; rounds every number of a list; counts the elements above a threshold; finds the most frequent element; decodes
a Caesar cipher; computes the area of a triangle from its sides; filters the strings that contain a substring"""
_ABOUT_CODE = """Write a Python function that {}.; Write a Python function with a docstring and type hints that {}.; Write
a JavaScript function that {}.; Write a Python function that {}, and explain how it works.; Write unit tests for a Python
function that {}.; Complete this Python function. It {}.;"""
_KINDS = (
    (_ABOUT_IDEAS, _IDEAS),
    (_ABOUT_TASKS, _TASKS),
    (_ABOUT_MAILS, _MAILS),
    (_ABOUT_HEROES, _HEROES),
    (_ABOUT_PAIRS, _PAIRS),
    (_ABOUT_PLACES, _PLACES),
    (_ABOUT_QUESTIONS, _QUESTIONS),
    (_ABOUT_CODE, _CODE),
)


def _listed(text: str) -> list[str]:
    return [" ".join(part.split()) for part in text.split(";") if part.strip()]


def prompts(seed: int = 1) -> list[str]:
    """Return all prompts, shuffled."""
    found = [form.format(what) for forms, whats in _KINDS for form, what in product(_listed(forms), _listed(whats))]
    random.Random(seed).shuffle(found)
    return found


if __name__ == "__main__":
    print("\n".join(prompts()))
