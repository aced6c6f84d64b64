"""Pages to look at in a browser: one HTML file each, with its style, its script and its data inside. A page asks no
host for anything. What a model wrote becomes markup through parts/rich.js alone, which lets nothing run.

markup        HTML out of values, escaped
document      a whole page: the template, the style, a script, data, and what its content may do
search_page   what searches found
chat_page     the page of a server to chat on
"""
