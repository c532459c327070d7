-- int_training_copies: training rows, numbered among the rows that ask the same question.
-- Grain: one row per good training row.
--   copy          bigint   1 for the row that is kept: first source, first row
--   first_answer  varchar  answer of the row that is kept
--   others        as in stg_problems
with final as (
    select
        stg_problems.* exclude (benchmark),
        row_number() over asked as copy,
        first_value(answer) over asked as first_answer
    from stg_problems
    where benchmark is null
    window asked as (partition by problem_id order by pool_order, row_number)
)

select * from final
