"""What each stage of the line does: files in, files out, and the model. See tasks/stage.py for the contract."""
