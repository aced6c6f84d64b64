"""Many sequences over one context: scheduling, the KV cache, sampling, texts."""
