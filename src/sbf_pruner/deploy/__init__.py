"""Networks as files that other runtimes run: ONNX, torch.export's archive, and the forms that run fastest there."""
