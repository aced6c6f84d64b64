"""OpenVINO GenAI in a process of its own, for bench/peers.py: its threads and Tilebeam's are never in one process.

    python openvino_worker.py MODEL.gguf THREADS SEQUENCES

Needs the packages openvino-genai and openvino-tokenizers, and nothing of Tilebeam, so that any Python can run it. It
prints a line of JSON when the model is loaded, then one for each line it reads: {"prompts": token ids of each, all of
one length, "samples": of each prompt, "max_tokens", "seed", "sampling": fields of a GenerationConfig} gives {"seconds",
"tokens"}. What is wrong is {"error"}.
"""

import json
import sys
import time
from typing import Any


def main() -> None:
    import numpy as np
    import openvino
    import openvino_genai as genai

    model, threads, sequences = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    scheduler = genai.SchedulerConfig()
    # The size of a batch that all engines have here; a prompt is read anew each time.
    scheduler.max_num_batched_tokens, scheduler.max_num_seqs = 512, sequences
    scheduler.enable_prefix_caching = False
    pipeline = genai.LLMPipeline(model, "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=threads)
    print(json.dumps({"version": genai.__version__}), flush=True)
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        config = genai.GenerationConfig()
        config.do_sample = True
        for name, value in asked["sampling"].items():
            setattr(config, name, value)
        config.ignore_eos, config.max_new_tokens, config.rng_seed = True, asked["max_tokens"], asked["seed"]
        config.num_return_sequences = asked["samples"]
        ids = np.array(asked["prompts"], np.int64)
        tokens = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        began = time.perf_counter()
        found = pipeline.generate(tokens, config)
        seconds = time.perf_counter() - began
        print(json.dumps({"seconds": seconds, "tokens": sum(map(len, found.tokens))}), flush=True)


if __name__ == "__main__":
    try:
        main()
    except Exception as error:  # of any kind: the bench goes on without
        print(json.dumps({"error": " ".join(str(error).split())[-300:]}), flush=True)
        sys.exit(1)
