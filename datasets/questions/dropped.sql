-- dropped RULE: the rows that a rule dropped, with the evidence and the other problem
with final as (
    select problem_id, source, row_number, evidence, question, other_problem_id, other_question
    from dropped
    where rule = $rule
    order by source, row_number
)

select * from final
