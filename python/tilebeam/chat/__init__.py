"""Conversations: prompts from messages, and answers read back as text, thoughts and calls of functions.

prepared           a chat between its messages and its answer: what is read, sampled, and told apart
chat_prompt        from messages to tokens     -> chat_template -> rendering (the process template_worker)
tools, chat_turns  functions and earlier calls, for templates that know them and for those that do not
tool_grammar       the grammar of calls that must be, or that have begun
answer_reader      from what a model writes to answer_parts -> thoughts, tool_calls (tool_families, tool_arguments)
refused            errors that name a field
"""
