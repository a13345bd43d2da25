"""JSON schema -> automata over bytes (draft 2020-12, and the draft-7 spellings of its keywords).

    document  keywords, references, pointers
    cases     what a set of subschemas allows together, as alternatives by type
    numbers   numeric text within bounds;  strings  patterns, lengths and formats
    emit      alternatives -> the graph of texts, containers called where they recurse

What is generated is a subset of what is valid, the same as in other engines and documented here:
members come in schema order and the rest after them; objects that declare ``properties`` and arrays
that declare ``prefixItems`` are closed unless ``additionalProperties`` or ``items`` says otherwise;
integers have no fraction or exponent, numbers with bounds no exponent; a string that is constrained
in its characters escapes only what an encoder escapes; whitespace is free between tokens.
"""
