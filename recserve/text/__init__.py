"""Between text and token numbers: tokenizer, chat template, streaming, stop strings."""
