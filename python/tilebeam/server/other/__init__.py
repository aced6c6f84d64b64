"""What clients of other servers ask: Anthropic's and llama-server's."""
