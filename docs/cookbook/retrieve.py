"""Find the document that answers a question: python retrieve.py EMBEDDING_MODEL [RERANK_MODEL].

Any model gives embeddings; those made for it (BGE, Nomic, Jina, EmbeddingGemma ..) are far better at it.
"""

import sys

import numpy as np
import tilebeam

DOCUMENTS = [
    "Cats purr when they breathe in and when they breathe out.",
    "The tallest tree is a coast redwood of 116 metres.",
    "A kitten sleeps up to twenty hours a day.",
]
QUESTION = "How long does a young cat sleep?"

with tilebeam.load(sys.argv[1]) as lm:
    vectors = lm.embed(DOCUMENTS)  # [documents, elements], of length 1; np.save keeps them
    near = np.argsort(-vectors @ lm.embed(QUESTION))[:2]
    print("nearest:", *(DOCUMENTS[i] for i in near), sep="\n  ")

if len(sys.argv) > 2:
    with tilebeam.load(sys.argv[2]) as ranker:
        scores = ranker.rerank(QUESTION, [DOCUMENTS[i] for i in near])
        print("best:", DOCUMENTS[near[scores.argmax()]])
