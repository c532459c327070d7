-- why PROBLEM_ID: what became of the rows that ask this question: pool, benchmark, or the rule that dropped them, with evidence and the other problem
with final as (
    select source, row_number, concat('kept in pool ', coalesce(pool, 'none')) as fate, null as evidence, null as other_problem_id, null as other_question, question
    from problems
    where problem_id = $problem_id
    union all by name
    select source, row_number, concat('dropped: ', rule) as fate, evidence, other_problem_id, other_question, question
    from dropped
    where problem_id = $problem_id
    union all by name
    select source, null as row_number, concat('held out in benchmark ', benchmark) as fate, question
    from benchmarks
    where problem_id = $problem_id
    union all by name
    select source, null as row_number, concat('overlap, only reported: ', rule) as fate, evidence, benchmark_problem_id as other_problem_id, benchmark_question as other_question, question
    from contamination
    where problem_id = $problem_id and not drops
)

select * from final
