"""Write a function, checked by hidden tests in a sandbox: the environment `code`."""
