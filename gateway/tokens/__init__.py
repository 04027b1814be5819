"""Token ids of prompts that arrive as text: local tokenizers and chat templates that give the engine's own ids."""
