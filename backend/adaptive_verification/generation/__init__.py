"""Text in, text out: continuous batching over the decode step, with streaming, stop words and cancellation.

The way of a request, one module each:

    request, sampling_parameters   raw inputs -> a validated `GenerationRequest`
    text_codec                     the target's tokenizer and chat template
    sequence, scheduler            all live sequences -> the next packed step -> what its result means
    engine                         the loop: one step after another, on one thread
    responder                      the other thread: text, responses, cancellation, metrics
    text_stream, detokenizer, stop_words, response    the tokens of one request -> its responses
    statistics                     what each step cost, and where the time went
    triton_step, triton_sink       the only modules that know Triton
"""
