-- dropped: every good training row that reached no pool's share, the rule that dropped it, and the evidence.
-- Grain: one row per dropped training row.
--   source            varchar  where it stands in the recipe, and what it is
--   row_number        bigint   1 for the first row of the source
--   row_id            varchar  the source's own name for the row; null without one
--   problem_id        varchar  first 16 hexadecimal digits of the SHA-256 of the normalised question
--   family            varchar  kind of problem
--   rule              varchar  the rule that dropped it; the first one in the order of the funnel
--   evidence          varchar  what the rule found
--   other_problem_id  varchar  the problem it repeats or overlaps; null when the rule looks at one problem
--   other_question    varchar  that problem's question
--   question          varchar  as it was read
--   answer            varchar  gold answer of this row
with excluded as (
    select
        stg_problems.*,
        int_exclusions.rule,
        int_exclusions.evidence,
        null::varchar as other_problem_id,
        null::varchar as other_question
    from int_exclusions
    inner join stg_problems using (pool_order, row_number)
),

copies as (
    select
        *,
        if(answer = first_answer, 'duplicate', 'duplicate, other answer') as rule,
        if(answer = first_answer, folded, concat(answer, ', before: ', first_answer)) as evidence,
        first_problem_id as other_problem_id,
        first_question as other_question
    from int_training_copies
    where copy > 1
),

repeats as (
    select
        later.*,
        int_repeats.rule,
        int_repeats.evidence,
        int_repeats.other_problem_id,
        earlier.question as other_question
    from int_repeats
    inner join int_training_copies as later on int_repeats.problem_id = later.problem_id and later.copy = 1
    inner join int_training_copies as earlier on int_repeats.other_problem_id = earlier.problem_id and earlier.copy = 1
),

overlapping as (
    select
        int_training_problems.*,
        int_contamination.rule,
        int_contamination.evidence,
        int_contamination.benchmark_problem_id as other_problem_id,
        int_held_out_problems.question as other_question
    from int_contamination
    inner join int_training_problems using (problem_id)
    inner join int_held_out_problems on int_contamination.benchmark_problem_id = int_held_out_problems.problem_id
),

gone as (
    select * from excluded
    union all by name
    select * from copies
    union all by name
    select * from repeats
    union all by name
    select * from overlapping
),

final as (
    select source, row_number, row_id, problem_id, family, rule, evidence, other_problem_id, other_question, question, answer
    from gone
)

select * from final
