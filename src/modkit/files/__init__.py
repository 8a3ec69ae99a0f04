"""Files: atomic writes, verified zip files, and readers of torch and safetensors files."""
