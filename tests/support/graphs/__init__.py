"""SGLang's decode graph runner on a CPU: graphs that are recorded and executed again."""
