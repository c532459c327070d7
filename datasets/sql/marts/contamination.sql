-- contamination: the list to review: each overlap of a training problem with a benchmark, with the evidence and both texts.
-- Grain: one row per rule, training problem and benchmark.
--   rule                  varchar  the rule, named after its source
--   drops                 boolean  whether its hits leave the training problems, or are only reported
--   problem_id            varchar  the training problem
--   family                varchar  its family
--   source                varchar  its source
--   evidence              varchar  the first shared words, or the masked question; null for a same question
--   score                 double   coverage (tulu3) or cosine similarity (embedding); null for other rules
--   question              varchar  the training question
--   benchmark             varchar  the benchmark it overlaps
--   benchmark_problem_id  varchar  the benchmark problem, taken or offered by its data
--   benchmark_question    varchar  the benchmark question
with final as (
    select
        hits.rule,
        rules.drops,
        hits.problem_id,
        training.family,
        training.source,
        hits.evidence,
        hits.score,
        training.question,
        hits.benchmark,
        hits.benchmark_problem_id,
        held_out.question as benchmark_question
    from contamination_hits as hits
    inner join decontamination_rules as rules using (rule)
    inner join int_training_problems as training using (problem_id)
    inner join int_held_out_problems as held_out on hits.benchmark_problem_id = held_out.problem_id
)

select * from final
