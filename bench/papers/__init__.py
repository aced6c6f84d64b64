"""What papers propose and what came of it here: measured, and not in the product unless it says so.

softmax_exp       the softmax's exponent from a table (EuroSys'26): a host's 32-bit exp is faster; the table's bits are
                  the product's default.
dequant_layouts   layouts of 4-bit weights (EuroSys'26, figure 15): `column` is the product's tile.
attention_stages  attention by its steps (EuroSys'26, figures 8 and 14): what the kernels' time consists of.

Of these the programs are gone, and bench/RESULTS.md (what was tried and left out) or docs/accuracy.md has the figures:

T-MAC (EuroSys'25)     products by tables of partial sums: one row gains 1.4 to 5.2 on AVX2, from four rows on only
                       weights below 2 bits gain. Not taken.
an NPU inference       a KV cache in the matrix unit's layout: one query gains, which waits for memory in a model. Not
service                taken; its BF16 tiles became softmax="bf16".
Agile-Quant (AAAI'24)  4-bit activations and pruned prompts: 8 bits for each 32 lose least. Not taken.
"""
