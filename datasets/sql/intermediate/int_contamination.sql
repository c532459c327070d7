-- int_contamination: training problems that overlap a benchmark problem, with the first piece of evidence.
-- Grain: one row per training problem_id.
--   problem_id            varchar  the training problem
--   rule                  varchar  `same question`, or `shared n-gram`
--   ngram                 varchar  the shared words; null for a same question
--   benchmark_problem_id  varchar  the benchmark problem it overlaps
with equal_questions as (
    select
        int_benchmark_problems.problem_id,
        'same question' as rule,
        null::varchar as ngram,
        int_benchmark_problems.problem_id as benchmark_problem_id,
        0 as start
    from int_benchmark_problems
    inner join int_training_copies using (problem_id)
    where int_training_copies.copy = 1
),

shared_ngrams as (
    select
        int_content_ngrams.problem_id,
        'shared n-gram' as rule,
        int_content_ngrams.ngram,
        int_benchmark_problems.problem_id as benchmark_problem_id,
        int_content_ngrams.start
    from int_content_ngrams
    inner join int_benchmark_ngrams using (ngram)
    inner join int_benchmark_problems on int_benchmark_ngrams.problem_id = int_benchmark_problems.problem_id
),

evidence as (
    select * from equal_questions
    union all
    select * from shared_ngrams
),

final as (
    select problem_id, rule, ngram, benchmark_problem_id
    from evidence
    qualify row_number() over (partition by problem_id order by rule, start, benchmark_problem_id) = 1
)

select * from final
