-- contamination: the list to review: each training problem dropped for overlap, with the evidence.
-- Grain: one row per training problem_id.
--   problem_id            varchar  the training problem
--   family                varchar  its family
--   source                varchar  its source
--   rule                  varchar  `same question`, or `shared n-gram`
--   ngram                 varchar  the shared words; null for a same question
--   question              varchar  the training question
--   benchmark             varchar  the benchmark it overlaps
--   benchmark_problem_id  varchar  the benchmark problem
--   benchmark_question    varchar  the benchmark question
with final as (
    select
        int_contamination.problem_id,
        training.family,
        training.source,
        int_contamination.rule,
        int_contamination.ngram,
        training.question,
        held_out.benchmark,
        int_contamination.benchmark_problem_id,
        held_out.question as benchmark_question
    from int_contamination
    inner join int_training_copies as training
        on int_contamination.problem_id = training.problem_id and training.copy = 1
    inner join int_benchmark_problems as held_out
        on int_contamination.benchmark_problem_id = held_out.problem_id
)

select * from final
