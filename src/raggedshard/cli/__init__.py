"""The command line: `main` holds the application, every other module with a command's name is that command."""
