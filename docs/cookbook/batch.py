"""Answer a file of questions, and go on where an earlier run stopped: python batch.py MODEL QUESTIONS.jsonl OUT.jsonl.

Each line of QUESTIONS.jsonl is {"id": .., "question": ..}.
"""

import json
import sys
from pathlib import Path

import tilebeam

model, source, target = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
done = {json.loads(line)["id"] for line in target.open()} if target.exists() else set()
items = [item for item in map(json.loads, source.open()) if item["id"] not in done]

with tilebeam.load(model, n_seq_max=32, n_ctx=16384) as lm, target.open("a") as out:
    # Prompts are made as slots come free; 32 of them decode together.
    prompts = (lm.chat_prompt([{"role": "user", "content": item["question"]}]) for item in items)
    for i, output in lm.completed(prompts, max_tokens=128, temperature=0):
        out.write(json.dumps({"id": items[i]["id"], "answer": output.outputs[0].text}) + "\n")
        out.flush()
        print(f"{items[i]['id']}: {output.usage.completion_tokens} tokens")
