"""Other engines' ways of scheduling, over the same core: TensorRT-LLM's that never evicts, SGLang's that puts prompts first."""
