"""OpenAI's API: bodies of requests in, its JSON and events out."""
