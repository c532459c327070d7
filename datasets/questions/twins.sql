-- twins: wordings that several problems share, which differ in their numbers only
with final as (
    select wording, problems, answers, families, first_problem_id
    from numbered_twins
    order by problems desc, wording
)

select * from final
