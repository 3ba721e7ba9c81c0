"""Write a function, judged by hidden tests in a sandbox: the environment `code`."""
