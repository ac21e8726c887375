"""The environments. A file here with a class `Task` is a task of the file's name."""
