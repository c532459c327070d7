-- dropped: every good training row that reached no pool's share, and the rule that dropped it.
-- Grain: one row per dropped training row.
--   source      varchar  where it stands in the recipe, and what it is
--   row_number  bigint   1 for the first row of the source
--   problem_id  varchar  first 16 hexadecimal digits of the SHA-256 of the normalised question
--   family      varchar  kind of problem
--   reason      varchar  `duplicate`, `duplicate, other answer`, `same question`, or `shared n-gram`
--   question    varchar  as it was read
--   answer      varchar  gold answer of this row
with reasons as (
    select
        copies.*,
        case
            when copies.copy > 1 and copies.answer <> copies.first_answer then 'duplicate, other answer'
            when copies.copy > 1 then 'duplicate'
            else int_contamination.rule
        end as reason
    from int_training_copies as copies
    left join int_contamination using (problem_id)
),

final as (
    select source, row_number, problem_id, family, reason, question, answer
    from reasons
    where reason is not null
)

select * from final
