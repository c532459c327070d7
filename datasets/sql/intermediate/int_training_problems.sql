-- int_training_problems: training questions that are neither excluded nor repeated; decontamination reads them.
-- Grain: one row per problem_id.
--   as in stg_problems
with final as (
    select * exclude (copy, first_answer, first_problem_id, first_question)
    from int_training_copies
    anti join int_repeats using (problem_id)
    where copy = 1
)

select * from final
