"""What runs within the sandbox: plain Python without any import from outside the standard library."""
