"""A second reader of the format, which names the rule behind every refusal."""
