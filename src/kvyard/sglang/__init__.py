"""SGLang's scheduler without a model and without a GPU, for ``kvyard hunt`` and recorders of logs. Nothing else imports it."""
