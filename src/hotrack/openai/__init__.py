"""OpenAI wire schemas, SSE framing and error bodies, shared by gateway and member server."""
