-- families: what the training problems that were kept are, family by family (the topics of a file are its families).
-- Grain: one row per family.
--   family               varchar  kind of problem
--   problems             bigint   problems kept
--   with_trace           bigint   of them with a worked trace
--   question_words_p50, question_words_p95, question_words_max   bigint  length of the question, split at white space
--   trace_words_p50      bigint   length of the trace; null without one
--   answers              bigint   distinct answers
--   scale_min, scale_max bigint   length of the chain a solver needs; 0 when unknown
with lengths as (
    select *, len(string_split_regex(question, '\s+')) as question_words, len(string_split_regex(trace, '\s+')) as trace_words
    from pools
),

final as (
    select
        family,
        count(*) as problems,
        count(trace) as with_trace,
        quantile_disc(question_words, 0.5) as question_words_p50,
        quantile_disc(question_words, 0.95) as question_words_p95,
        max(question_words) as question_words_max,
        quantile_disc(trace_words, 0.5) as trace_words_p50,
        count(distinct answer) as answers,
        min(scale) as scale_min,
        max(scale) as scale_max
    from lengths
    group by family
)

select * from final
