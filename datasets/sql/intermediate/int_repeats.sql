-- int_repeats: distinct training questions that are dropped because an earlier one is almost the same.
-- Grain: one row per training problem_id.
--   problem_id        varchar  the question that is dropped
--   rule              varchar  `near duplicate`, or `other numbers` (past twins_kept of one wording)
--   evidence          varchar  the similarity, or the wording
--   other_problem_id  varchar  the earlier question
with twins as (
    select
        problem_id,
        masked,
        row_number() over same_wording as twin,
        first_value(problem_id) over same_wording as other_problem_id
    from int_training_copies
    anti join near_duplicates using (problem_id)
    where copy = 1 and contains(masked, '#')
    window same_wording as (partition by masked order by pool_order, row_number)
),

final as (
    select
        problem_id,
        'near duplicate' as rule,
        concat('Jaccard similarity ', round(similarity, 3), ' of word 5-grams, the same numbers and signs') as evidence,
        other_problem_id
    from near_duplicates
    union all
    select twins.problem_id, 'other numbers', concat('number ', twins.twin, ' of the wording: ', twins.masked), twins.other_problem_id
    from twins
    cross join settings
    where settings.twins_kept > 0 and twins.twin > settings.twins_kept
)

select * from final
