-- int_benchmark_ngrams: runs of n words in benchmark questions, words being split at white space only (open-r1).
-- All candidates are here, taken or not: what is boilerplate is better seen on more questions.
-- Grain: one row per candidate and position.
--   problem_id  varchar  the benchmark question
--   family      varchar  its family
--   start       bigint   position of the first word, from 1
--   ngram       varchar  n words, joined by spaces
with words as (
    select problem_id, family, string_split(normalised, ' ') as words
    from int_benchmark_candidates
),

starts as (
    select
        words.*,
        settings.ngram_words as n,
        unnest(range(1, len(words.words) - n + 2)) as start
    from words
    cross join settings
),

final as (
    select problem_id, family, start, array_to_string(words[start:start + n - 1], ' ') as ngram
    from starts
)

select * from final
