"""Pages to look at in a browser: one HTML file each, with its style, its script and its data inside. A page asks no
host for anything, and what a model wrote never becomes markup.

markup        HTML out of values, escaped
document      a whole page: the template, the style, a script, data, and what its content may do
search_page   what searches found
ask           the page of a server on which questions are asked
"""
