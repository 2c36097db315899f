"""The same prompts through our engine and through others', in turn, on one machine. Never a part of CI."""
