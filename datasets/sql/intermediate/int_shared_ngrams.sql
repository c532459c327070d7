-- int_shared_ngrams: runs of n words in training questions that also stand in a benchmark candidate.
-- Grain: one row per training problem and position.
--   problem_id  varchar  the training question
--   family      varchar  its family
--   start       bigint   position of the first word, from 1
--   ngram       varchar  n words, joined by spaces
with words as (
    select problem_id, family, string_split(normalised, ' ') as words
    from int_training_copies
    where copy = 1
),

starts as (
    select
        words.*,
        settings.ngram_words as n,
        unnest(range(1, len(words.words) - n + 2)) as start
    from words
    cross join settings
),

ngrams as (
    select problem_id, family, start, array_to_string(words[start:start + n - 1], ' ') as ngram
    from starts
),

final as (
    select ngrams.*
    from ngrams
    where ngrams.ngram in (select ngram from int_benchmark_ngrams)
)

select * from final
