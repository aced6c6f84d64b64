"""Grammars read into lists: what they say, and what is refused with which words."""

from __future__ import annotations

import pytest
from grammars_kit import GOOD
from tilebeam.grammars.rules import Kind, RulesError, read_rules


def test_a_grammar_as_lists() -> None:
    rules = read_rules('root ::= "ab" x*\nx ::= [^a-c\\n] | <think> !<[7]> | "" # none\n', {"<think>": 3}.get)
    assert rules.bodies[0] == [[(Kind.SET, 0), (Kind.SET, 1), (Kind.RULE, 2)]]
    assert rules.bodies[1] == [[(Kind.SET, 2)], [(Kind.TOKEN, 3), (Kind.NOT_TOKEN, 7)], []]
    assert rules.bodies[2] == [[(Kind.RULE, 1), (Kind.RULE, 2)], []]
    assert rules.sets[:2] == [((97, 97),), ((98, 98),)]
    assert rules.sets[2] == ((1, 9), (11, 96), (100, 0xD7FF), (0xE000, 0x10FFFF))


@pytest.mark.parametrize(
    ("text", "body"),
    [
        ("a{3}", "a a a"),
        ("a{2,}", "a a rest"),
        ("a+", "a rest"),
        ("a{0}", ""),
        ("a{0,0}", ""),
        ('""{5}', ""),
        ("(a){2}", "a a"),
        ("(\na\n)", "a"),
        ("a{ 1 , 1 }", "a"),
        ("a?", "rest"),
        ("a{0,5}", "rest"),
    ],
)
def test_repetitions(text: str, body: str) -> None:
    rules = read_rules(f'root ::= {text}\na ::= "a"')
    names = {0: "root", 1: "a"} if len(rules.bodies) > 1 else {}
    assert " ".join(names.get(value, "rest") for _, value in rules.bodies[0][0]) == body


def test_copies_share_what_they_repeat() -> None:
    rules = read_rules('root ::= ("abcdefgh" [0-9]){2000,4000}')
    assert sum(len(alternative) for body in rules.bodies for alternative in body) < 3 * 4000 + 20


@pytest.mark.parametrize("name", GOOD)
def test_grammars_that_people_use(name: str) -> None:
    assert read_rules(GOOD[name]).bodies


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no rule 'root'"),
        ("root ::= missing", "no rule 'missing'"),
        ('start ::= "a"', "no rule 'root'"),
        ("nothing", "::= expected in line 1, where it ends"),
        ('root ::= "a', "the end of a text or class"),
        ("root ::= [a-", "the end of a text or class"),
        ('root ::= "a"\n\n= "b"', "name of a rule expected in line 3, before '= \"b\"'"),
        ('root ::= "a" ) "b"', "end of the rule expected"),
        ('root ::= ("a" "b"', r"\) expected"),
        ('root ::= "\\q"', "escape"),
        ('root ::= "\\u12"', "4 hexadecimal digits"),
        ('root ::= "\\UFFFFFFFF"', "8 hexadecimal digits"),
        ("root ::= * ", "something to repeat"),
        ('root ::= "a"{x}', r"a repetition, as \{2\}"),
        ('root ::= "a"{٣}', r"a repetition, as \{2\}"),  # another script's digit
        ('root ::= "a"{3,1}', "at least 3 and at most 1"),
        ('root ::= "a"{99999999}', "repeats more than"),
        ("root ::= " + '"a"{65000} ' * 5, "too large"),
        ("root ::= <nothing>", "<nothing> is not one token"),
        ("root ::= <", "a token, as <NAME>"),
        ('root ::= root "a" | "b"', "left-recursive"),
        ('root ::= x\nx ::= [a]? y "b"\ny ::= [c]* x "d" | "e"', "left-recursive"),
    ],
)
def test_what_is_no_grammar(text: str, says: str) -> None:
    with pytest.raises(RulesError, match=says):
        read_rules(text)


def test_recursion_that_reads_something_is_fine() -> None:
    read_rules('root ::= "(" root ")" | list\nlist ::= ws list | [a-z]\nws ::= " "?')


def test_large_grammars_are_read_without_recursion() -> None:
    chain = "".join(f"r{i} ::= o r{i + 1} | r{i + 1}\n" for i in range(4000))
    rules = read_rules(f'root ::= r0\n{chain}r4000 ::= "a"\no ::= "b"?')
    assert len(rules.bodies) == 4004


def test_parentheses_are_counted_where_they_nest() -> None:
    deep = "root ::= " + '(")" ' * 400 + '"a"' + ")" * 400
    with pytest.raises(RulesError, match="nested more than"):
        read_rules(deep)
    assert read_rules("root ::= " + '(")") ' * 400)
