-- int_contamination: training problems that leave for overlap with a benchmark, with the first piece of evidence.
-- Hits are found in stages/decontamination.py; a question that equals a benchmark's comes first, then rules in the order of the settings.
-- Grain: one row per training problem_id.
--   problem_id            varchar  the training problem
--   rule                  varchar  the rule, named after its source
--   evidence              varchar  the shared words or the score; null for a same question
--   benchmark_problem_id  varchar  the benchmark problem it overlaps
with final as (
    select
        hits.problem_id,
        hits.rule,
        coalesce(hits.evidence, 'score ' || round(hits.score, 3)) as evidence,
        hits.benchmark_problem_id
    from contamination_hits as hits
    inner join decontamination_rules as rules using (rule)
    where rules.drops
    qualify row_number() over (
        partition by hits.problem_id
        order by rules.place, hits.start, hits.score desc, hits.benchmark_problem_id
    ) = 1
)

select * from final
