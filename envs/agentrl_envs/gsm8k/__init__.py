"""Grade-school word problems, solved with a calculator: the environment `gsm8k`."""
