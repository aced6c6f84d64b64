"""Grammars for tests: those that people use, and those that are made to keep a matcher busy."""

from __future__ import annotations

JSON = r"""
# any JSON value
root    ::= value
value   ::= object | array | text | number | "true" | "false" | "null"
object  ::= "{" ws ( member ( "," ws member )* )? "}" ws
member  ::= text ":" ws value
array   ::= "[" ws ( value ( "," ws value )* )? "]" ws
text    ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" ( ["\\/bfnrt] | "u" [0-9a-fA-F]{4} ) )* "\"" ws
number  ::= "-"? ( "0" | [1-9] [0-9]{0,15} ) ( "." [0-9]+ )? ( [eE] [-+]? [0-9]{1,3} )? ws
ws      ::= | " " | "\n" [ \t]{0,20}
"""

SUMS = r"""
root    ::= ( sum "=" space atom "\n" )+
sum     ::= product ( [-+] space product )*
product ::= atom ( [*/] space atom )*
atom    ::= name | digits | "(" space sum ")" space
name    ::= [a-z] [a-z0-9_]* space
digits  ::= [0-9]+ space
space   ::= [ \t\n]*
"""

CHESS = r"""
root   ::= ( [1-9] [0-9]? ". " half " " half "\n" )+
half   ::= ( pawn | piece | castle ) [+#]?
piece  ::= [NBRQK] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn   ::= ( [a-h] "x" )? [a-h] [1-8] ( "=" [NBRQ] )?
castle ::= "O-O" "-O"?
"""

JAPANESE = r"""
root     ::= word+ ( [ \t\n] word+ )*
word     ::= hiragana | katakana | mark | kanji
hiragana ::= [ぁ-ゟ]
katakana ::= [ァ-ヿ]
mark     ::= [、-〾]
kanji    ::= [一-龯]
"""

BULLETS = """
root ::= line+
line ::= "- " [^\\r\\n\\x0b\\x0c\\x85\\u2028\\u2029]+ "\\n"
"""

C_PROGRAM = r"""
root      ::= ( function )+
function  ::= type ws name "(" ws ( parameter ( "," ws parameter )* )? ")" ws block
parameter ::= type ws name
type      ::= "int" | "float" | "char" | "void"
block     ::= "{" ws statement* "}" ws
statement ::= ( type ws name ws ( "=" ws value )? ";" ws
            | name ws "=" ws value ";" ws
            | name "(" ws arguments? ")" ws ";" ws
            | "return" ws value? ";" ws
            | "while" ws "(" ws test ")" ws block
            | "for" ws "(" ws name ws "=" ws value ";" ws test ";" ws name ws "=" ws value ")" ws block
            | "if" ws "(" ws test ")" ws block ( "else" ws block )?
            | "//" [^\n]* "\n" ws
            | "/*" ( [^*] | "*" [^/] )* "*/" ws )
test      ::= value ( "<=" | "<" | "==" | "!=" | ">=" | ">" ) ws value
value     ::= term ( ( "+" | "-" ) ws term )*
term      ::= factor ( ( "*" | "/" ) ws factor )*
factor    ::= name ws | number ws | "-" factor | "(" ws value ")" ws | name "(" ws arguments? ")" ws
arguments ::= value ( "," ws value )*
name      ::= [a-zA-Z_] [a-zA-Z_0-9]*
number    ::= [0-9]+
ws        ::= [ \t\n]+ | ""
"""

GOOD = {
    "json": JSON,
    "sums": SUMS,
    "chess": CHESS,
    "japanese": JAPANESE,
    "bullets": BULLETS,
    "c": C_PROGRAM,
    "many": 'root ::= "a"{0,3000} "b"',
    "copies": "root ::= [a-z ]{500,900}",
    # A character or nothing, again and again: sets of stacks, but never more than these.
    "optional": "root ::= " + " ".join(["[a-y]?", '"b"?'] * 100) + ' "z"',
    "optional rules": "root ::= (x y? | y x?){0,20}\nx ::= [a-m]?\ny ::= x x? [n-z]?",
    "alike": "root ::= ( " + " | ".join(["[a-z]"] * 64) + " )*",
    # One text, 2^40 ways.
    "chain": "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1} | r{i + 1}\n" for i in range(40)) + 'r40 ::= "a"',
    "words": "root ::= ( [a-z] | [a-z] [a-z] | [a-z]{1,5} | [a-z]+ )* [0-9]",
}

# What no matcher follows to the end: each has more ways than there is room for, at once or soon.
HOSTILE_AT_ONCE = {
    "doubling": "root ::= r0\n"
    + "".join(f"r{i} ::= r{i + 1} r{i + 1} | r{i + 1}\n" for i in range(60))
    + 'r60 ::= "a"',
    "nested": 'root ::= ( ( ( ( "a"? "b"? ){0,99} ){0,99} ){0,99} ){0,99}',
    "nested rules": "root ::= x{0,500}\nx ::= y{0,500}\ny ::= z{0,500}\nz ::= [a-z]?",
}
HOSTILE_SOON = {
    "two ways on": 'root ::= [a-z ] root "b"? | [a-z ] root "c"? | [a-z ]',
    "three ways on": "root ::= [^\\n] ( root [a-z]? | root [b-y]? | root [c-x]? | root )",
}
