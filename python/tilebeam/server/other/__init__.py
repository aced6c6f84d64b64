"""What other servers' clients ask: llama-server's, vLLM's, and those of rerank and score services."""
