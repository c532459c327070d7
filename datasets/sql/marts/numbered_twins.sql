-- numbered_twins: wordings that several distinct training questions share, which differ in their numbers only.
-- They are reported, not dropped, unless `twins_kept` says so: other numbers make another question.
-- Grain: one row per wording.
--   wording           varchar  the folded question with # for every number
--   problems          bigint   questions of this wording
--   answers           bigint   distinct answers among them
--   families          varchar  their families, joined by commas
--   first_problem_id  varchar  the first of them
--   first_question    varchar  its text
with final as (
    select
        masked as wording,
        count(*) as problems,
        count(distinct answer) as answers,
        string_agg(distinct family, ', ' order by family) as families,
        arg_min(problem_id, (pool_order, row_number)) as first_problem_id,
        arg_min(question, (pool_order, row_number)) as first_question
    from int_training_copies
    where copy = 1 and contains(masked, '#')
    group by masked
    having count(*) > 1
)

select * from final
