"""GBNF grammars made of JSON schemas: every text that such a grammar lets through is valid under the schema."""
