-- int_training_copies: training rows that no exclusion met, numbered among the rows that ask the same question.
-- Grain: one row per such row.
--   trace             varchar  its own, else that of the first row that asks the same and has the same answer; null without one
--   copy              bigint   1 for the row that is kept: first source, first row
--   first_answer      varchar  answer of the row that is kept
--   first_problem_id  varchar  problem_id of the row that is kept; another one when only the folded texts agree
--   first_question    varchar  its question
--   others            as in stg_problems
with final as (
    select
        stg_problems.* exclude (benchmark) replace (coalesce(trace, first_value(trace ignore nulls) over answered) as trace),
        row_number() over asked as copy,
        first_value(answer) over asked as first_answer,
        first_value(problem_id) over asked as first_problem_id,
        first_value(question) over asked as first_question
    from stg_problems
    anti join int_exclusions using (pool_order, row_number)
    where benchmark is null
    window
        asked as (partition by folded order by pool_order, row_number),
        answered as (
            partition by folded, answer order by pool_order, row_number rows between unbounded preceding and unbounded following
        )
)

select * from final
